"""From a checkpoint's files to one rank's weights."""
