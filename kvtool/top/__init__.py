"""What `kvtool top` is made of: server asks, reading is what it says, view what that means over time, draw draws."""
