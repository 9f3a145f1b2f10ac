"""``kyb demo``: the proof that the stack works. Replays arrivals against a router and measures what came of them."""
