"""The same way where a compressor carries the messages: conversations instead of sums."""
