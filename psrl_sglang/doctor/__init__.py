"""What would be used between this host and others, and why not more: checks that look and change nothing.

A check is a function that returns `CheckResult`s; `runner` gives each a thread and a deadline. Whatever may crash
or hang (NIXL) is tried in a process of its own.
"""
