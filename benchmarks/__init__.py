"""Commands that show and measure."""
