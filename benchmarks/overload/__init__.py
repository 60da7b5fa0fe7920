"""What a server does when it is asked for far more than it can do."""
