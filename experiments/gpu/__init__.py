"""The GPU edition of async_vs_sync, stale_kv_cache and peers: one GPU for generator and trainer."""
