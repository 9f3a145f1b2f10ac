"""A fake kubelet: the real device manager's behaviour, with pods that are local processes.

What it does and in which order follows ``docs`` of the device plugin contract v1beta1; where the real one punishes a
plugin, this one does too.
"""
