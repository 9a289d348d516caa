"""How long exchanges take, from measured links and traces; pure, no sockets and no clocks."""
