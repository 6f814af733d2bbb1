"""The papers' claims against systems that are broken on purpose: each claim notices some breaks."""
