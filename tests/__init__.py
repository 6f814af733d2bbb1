"""What each room promises."""
