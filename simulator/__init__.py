"""The policies on machines that are not here: devices, a cost model, a virtual clock."""
