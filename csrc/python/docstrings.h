/* SPDX-License-Identifier: Apache-2.0 */
/* Generated from cyclone_kv/_core.pyi by scripts/reference_pages.py. */
#ifndef CKVPY_DOCSTRINGS_H
#define CKVPY_DOCSTRINGS_H
/* clang-format off */

#define CKVPY_DOC_Lease_release \
    "release($self, /)\n" \
    "--\n" \
    "\n" \
    "Unpin.  BufferError while a buffer of it is in use.\n"

#define CKVPY_DOC_Reservation_commit \
    "commit($self, overwrite, /)\n" \
    "--\n" \
    "\n" \
    "Store.  BufferError, and nothing stored, while a buffer of it is in use.\n"

#define CKVPY_DOC_Cache_closed \
    "True after ``close`` (or when never opened).\n"

#define CKVPY_DOC_Cache_clear \
    "clear($self, /)\n" \
    "--\n" \
    "\n" \
    "Remove every block of this namespace; return how many there were.\n" \
    "\n" \
    "Durable when it returns.  Views of removed blocks stay as they are.\n"

#define CKVPY_DOC_Cache_close \
    "close($self, /)\n" \
    "--\n" \
    "\n" \
    "End the handle.  Idempotent.\n" \
    "\n" \
    "Waits for calls of other threads, and refuses later ones with " \
    "``ClosedError``.\n" \
    "Views and entries stay readable; what they need is kept until the last " \
    "is gone.\n"

#define CKVPY_DOC_Cache_contains \
    "contains($self, key, /)\n" \
    "--\n" \
    "\n" \
    "Return whether a block is stored, from memory alone.\n"

#define CKVPY_DOC_Cache_contains_many \
    "contains_many($self, keys, /)\n" \
    "--\n" \
    "\n" \
    "Return for each key whether a block is stored, from memory alone.\n" \
    "\n" \
    "``keys`` is a sequence of bytes-like keys, or for speed one contiguous " \
    "buffer\n" \
    "of n * 32 bytes, such as a uint8 array of shape (n, 32).\n"

#define CKVPY_DOC_Cache_get \
    "get($self, key, /)\n" \
    "--\n" \
    "\n" \
    "Return the payload as a read-only view of the volume, or None for a " \
    "miss.\n" \
    "\n" \
    "The bytes never change and stay readable while the view, or anything " \
    "made from\n" \
    "it, lives: through eviction, ``remove``, ``clear`` and ``close``.  The " \
    "block is\n" \
    "pinned for as long; drop views soon, or use ``get_into``.\n"

#define CKVPY_DOC_Cache_get_into \
    "get_into($self, /, key, target)\n" \
    "--\n" \
    "\n" \
    "Copy a block into a writable buffer, or a list of them filled in order.\n" \
    "\n" \
    "Return the bytes copied, or None for a miss and for a target that is too" \
    " short\n" \
    "(counted as ``short_buffers``).  After None the content of the target is\n" \
    "undefined.\n"

#define CKVPY_DOC_Cache_get_many_into \
    "get_many_into($self, /, keys, targets, *, exact=False)\n" \
    "--\n" \
    "\n" \
    "Copy many blocks, one target (or list of buffers) for each key.\n" \
    "\n" \
    "Never raises for one key: False stands for a miss or a short target, " \
    "whose\n" \
    "content is then undefined.  With ``exact=True`` a target that is longer " \
    "than\n" \
    "the block is a False too.  The whole batch runs without the GIL.\n"

#define CKVPY_DOC_Cache_longest_prefix \
    "longest_prefix($self, /, keys, *, touch=False)\n" \
    "--\n" \
    "\n" \
    "Return how many leading keys are stored, from memory alone.\n" \
    "\n" \
    "``touch=True`` gives those blocks two passes of the eviction cursor, so " \
    "that\n" \
    "they are still there when a load follows.\n"

#define CKVPY_DOC_Cache_prefetch \
    "prefetch($self, keys, /)\n" \
    "--\n" \
    "\n" \
    "Start reading blocks into the page cache; return how many were found.\n"

#define CKVPY_DOC_Cache_put \
    "put($self, /, key, data, *, header=None, overwrite=False)\n" \
    "--\n" \
    "\n" \
    "Store a block; return whether every process can now find it.\n" \
    "\n" \
    "``key`` has 1 to 65 535 bytes; 32 are used as they are, other lengths " \
    "are\n" \
    "digested.  ``data`` is a buffer, or a list of buffers that follow each " \
    "other.\n" \
    "A key that is stored already, with a block of these lengths, is a cheap " \
    "True,\n" \
    "unless ``overwrite`` replaces it.\n" \
    "False: refused for now; ``stats()`` counts the reasons (``puts_busy``,\n" \
    "``puts_no_run``, ``puts_not_admitted``, ``puts_in_flight``,\n" \
    "``puts_failed_path``, ``puts_io_failed``).  ``ValueTooLargeError``: can " \
    "never\n" \
    "fit.  Bytes that another thread changes during the call become a miss " \
    "later.\n"

#define CKVPY_DOC_Cache_put_many \
    "put_many($self, /, items, *, chain=False, parent=None, overwrite=False)\n" \
    "--\n" \
    "\n" \
    "Store many blocks, each (key, data) or (key, data, header).\n" \
    "\n" \
    "``chain=True``: consecutive blocks of one prefix, its head first; they " \
    "are\n" \
    "stored so that the tail is evicted before the head. ``parent`` is the " \
    "key of the\n" \
    "block before the first. Never raises for one block: a False may also " \
    "mean that\n" \
    "it can never fit. The whole batch runs without the GIL.\n"

#define CKVPY_DOC_Cache_recover \
    "recover($self, /)\n" \
    "--\n" \
    "\n" \
    "Verify failed paths; return how many are in use again.\n"

#define CKVPY_DOC_Cache_remove \
    "remove($self, key, /)\n" \
    "--\n" \
    "\n" \
    "Remove a block; return whether there was one.  Durable with the next " \
    "sync.\n"

#define CKVPY_DOC_Cache_sync \
    "sync($self, /)\n" \
    "--\n" \
    "\n" \
    "Make every put that returned before the call durable.\n"

#define CKVPY_DOC_Cache_touch \
    "touch($self, keys, /)\n" \
    "--\n" \
    "\n" \
    "Give blocks two passes of the eviction cursor; return how many were " \
    "found.\n"

#define CKVPY_DOC_Cache_len \
    "__len__($self, /)\n" \
    "--\n" \
    "\n" \
    "Blocks of this namespace.\n"

#endif /* CKVPY_DOCSTRINGS_H */
