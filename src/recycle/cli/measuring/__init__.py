"""Commands about measurements: `profile`, `bench`, `report`."""
