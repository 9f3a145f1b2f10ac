"""``make e2e``: the chart on a real cluster, from installation to an uninstallation that leaves nothing."""
