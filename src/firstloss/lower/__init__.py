"""ATen to StableHLO: the table of rules, a file per family, and the driver that runs a Program through them."""
