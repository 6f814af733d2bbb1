"""Devices, a cost model, and the policies on a clock that only counts. Read first: devices.py."""
