"""The adviser: should we federate, how much should each client personalise, what will it cost?"""
