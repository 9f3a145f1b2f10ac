"""A manager that grants a group to whoever asks, whether or not somebody holds it."""

import dataclasses

from kybernate.policy import GroupView
from kybernate.topology import Group
from services.gpu_manager import __main__, looking
from services.gpu_manager.board import Board
from services.gpu_manager.inputs import Now

see = looking.view


def no_holders(board: Board, group: Group, now: Now) -> GroupView:
    return dataclasses.replace(see(board, group, now), slots=99)


looking.view = no_holders
looking.room = lambda board, row, **_: True
__main__.main()
