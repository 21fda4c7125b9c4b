"""DeepSpeed's configuration, which ``arguments`` reads as the arguments of a Strategy."""
