"""stub"""


def write() -> None:
    """stub"""
