"""A recorded run beside a simulation of it: its epochs as measured, and as the simulator predicts them."""
