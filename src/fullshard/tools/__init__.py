"""The command line, the planner and the simulator. Nothing in the engine imports from here."""
