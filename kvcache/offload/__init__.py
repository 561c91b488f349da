"""The way from the device to host memory and stores, and back."""
