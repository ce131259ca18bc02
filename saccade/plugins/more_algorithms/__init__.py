"""Less common advantages, policy losses, aggregations and corrections; rows of the same tables as the core's."""
