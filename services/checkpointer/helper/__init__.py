"""The process that calls the driver, which the checkpointer may kill at any moment.

Standard library only, besides the binding to the driver: it is started again after each hang.
"""
