TASKS = ()
