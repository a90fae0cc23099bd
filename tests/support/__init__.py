"""What the tests share: arithmetics and their derived tolerances, registry cases, tensor layouts."""
