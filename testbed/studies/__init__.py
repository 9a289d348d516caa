"""Studies made with the library: the published tables, the accuracy of compressors."""
