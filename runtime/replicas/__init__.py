"""Engines that come and go behind frontends, by whoever starts them."""
