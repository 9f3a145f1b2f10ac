"""Development tools: fakes, the local stack and the demo. Production code never imports them."""
