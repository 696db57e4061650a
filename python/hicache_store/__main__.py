"""`python -m hicache_store` is `hicache-store`."""

from hicache_store._tool import main

main()
