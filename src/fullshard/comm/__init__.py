"""Every call of torch.distributed: process groups, control messages, the flight recorder and the watchdog."""
