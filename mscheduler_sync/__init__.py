"""
A synchronous, thread-pool task scheduler on MongoDB.
"""

__version__ = "0.1.0"
