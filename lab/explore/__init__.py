"""What the schedule page runs inside a browser, where there is no torch: a policy that was
written in the page, or the solution of an exercise. Read first: answer.py."""
