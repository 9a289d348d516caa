"""An emulated cluster on one Linux machine: namespaces, a bridge and shaped links."""
