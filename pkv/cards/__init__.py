"""Cards: GPU profiles in files, a cost model that predicts a plan's time, and a simulator that plays a plan."""
