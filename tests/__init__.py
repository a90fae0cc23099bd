"""The test suite of epigemm: table-driven over the registry of epilogues."""
