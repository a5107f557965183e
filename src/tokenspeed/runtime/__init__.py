"""The device side of a step: what is compiled, what lives on the device, and the one owner of both."""
