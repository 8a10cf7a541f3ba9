"""Plans: a configuration and hardware facts become a layout of the run, or an error."""
