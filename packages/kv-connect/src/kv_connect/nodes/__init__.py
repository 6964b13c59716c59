"""One engine on several nodes: a hit is what every node's server holds."""
