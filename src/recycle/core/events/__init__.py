"""Events as data: the record of a run, failure traces by the clock, failure scripts by the step."""
