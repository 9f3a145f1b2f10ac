"""The webhook's decisions: an AdmissionReview in, a JSON Patch or a refusal out. Pure."""
