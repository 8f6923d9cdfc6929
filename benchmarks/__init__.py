"""The figures that Firstloss promises, each measured against the other way in one run."""
