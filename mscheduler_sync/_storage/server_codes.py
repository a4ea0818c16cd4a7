"""
The error codes of the server that mean something to us, by their names in MongoDB.

See https://github.com/mongodb/mongo/blob/master/src/mongo/base/error_codes.yml.
"""

from __future__ import annotations

import enum
from typing import Final

DUPLICATE_KEY: Final = 11000


class Passing(enum.IntEnum):
    """
    "Not now": unreachable, interrupted, stepping down, shutting down, overloaded, write concern.
    """

    HOST_UNREACHABLE = 6
    HOST_NOT_FOUND = 7
    LOCK_TIMEOUT = 24
    CURSOR_NOT_FOUND = 43
    LOCK_BUSY = 46
    MAX_TIME_MS_EXPIRED = 50
    STALE_SHARD_VERSION = 63
    WRITE_CONCERN_TIMEOUT = 64
    UNKNOWN_REPL_WRITE_CONCERN = 79
    NETWORK_TIMEOUT = 89
    SHUTDOWN_IN_PROGRESS = 91
    UNSATISFIABLE_WRITE_CONCERN = 100
    WRITE_CONFLICT = 112
    FAILED_TO_SATISFY_READ_PREFERENCE = 133
    READ_CONCERN_MAJORITY_NOT_AVAILABLE_YET = 134
    CAPPED_POSITION_LOST = 136
    PRIMARY_STEPPED_DOWN = 189
    NETWORK_INTERFACE_EXCEEDED_TIME_LIMIT = 202
    CURSOR_KILLED = 237
    NO_SUCH_TRANSACTION = 251
    EXCEEDED_TIME_LIMIT = 262
    TRANSACTION_EXCEEDED_LIFETIME_LIMIT_SECONDS = 290
    CONNECTION_POOL_EXPIRED = 317
    INTERNAL_TRANSACTION_NOT_SUPPORTED = 358
    CONNECTION_ERROR = 384
    INGRESS_REQUEST_RATE_LIMIT_EXCEEDED = 462
    #: Of a proxy of Atlas that does not reach the cluster; not in the server's list.
    ATLAS_ERROR = 8000
    SOCKET_EXCEPTION = 9001
    LEGACY_NOT_PRIMARY = 10058
    NOT_WRITABLE_PRIMARY = 10107
    INTERRUPTED_AT_SHUTDOWN = 11600
    INTERRUPTED = 11601
    INTERRUPTED_DUE_TO_REPL_STATE_CHANGE = 11602
    STALE_CONFIG = 13388
    NOT_PRIMARY_NO_SECONDARY_OK = 13435
    NOT_PRIMARY_OR_SECONDARY = 13436
    BACKUP_CURSOR_OPEN_CONFLICT_WITH_CHECKPOINT = 50915


class NoStreams(enum.IntEnum):
    """
    A change stream cannot be opened here: no replica set, no privilege, not supported.
    """

    UNAUTHORIZED = 13
    ILLEGAL_OPERATION = 20
    COMMAND_NOT_FOUND = 59
    COMMAND_NOT_SUPPORTED = 115
    #: Assertions of the server where it reads a pipeline; these have no names.
    UNRECOGNIZED_PIPELINE_STAGE = 40324
    CHANGE_STREAM_WITHOUT_REPLICA_SET = 40573


PASSING_CODES: Final = frozenset(Passing)
NO_STREAMS_CODES: Final = frozenset(NoStreams)
