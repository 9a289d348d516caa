"""From folders of cells to one table, in the formats that people and programs read."""
