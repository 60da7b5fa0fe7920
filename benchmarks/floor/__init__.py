"""What a machine could do at best with a workload."""
