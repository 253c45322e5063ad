"""Engines that turn token ids into token ids."""
