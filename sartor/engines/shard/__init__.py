"""A simulation whose lanes are shared by several processes (torch.distributed)."""
