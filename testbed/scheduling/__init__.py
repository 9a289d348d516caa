"""When which bytes leave: pure planning from a trace and a link to a frozen plan."""
