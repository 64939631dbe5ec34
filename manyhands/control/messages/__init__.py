"""Every message of the control plane, as data; what sends and receives them is in the folders beside this one."""
