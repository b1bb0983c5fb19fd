"""Does the series hold on another upstream? Tried out of the way of everybody's work, and told to a machine."""
