"""The device plugin: what kubelet sees of Kybernate."""
