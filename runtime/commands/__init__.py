"""The subcommands of `lockstep`, one a module."""
