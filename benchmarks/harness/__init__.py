"""Accuracy, the steps of a measurement, records, tables and plots."""
