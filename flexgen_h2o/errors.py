"""The one exception that a user's input causes."""


class UserError(Exception):
    """A problem that the user can mend, in one line: what is wrong and what to do.

    `flex_opt` prints it as ``error: ...`` on stderr and exits with status 2.
    """
